"""Side-by-side benchmarks of jaxbuf and its peers: ``python -m benchmarks --help``.

How it measures:

* The libraries of a row take turns in short blocks, A B C, B C A, C A B, ..., so that a noisy
  machine disturbs all of them alike. A time is the median over the blocks; a ratio is the median of
  the ratios *within* a turn, with its quartiles.
* They run in one process, except peers that need their own environment
  ([`benchmarks.peer_process`][]): these wait in their own process, and measure themselves when it
  is their turn.
* Before a row is timed, each library has to show that it does the work
  ([`benchmarks.equality`][]): the data read back are the data stored, probabilities and weights
  follow from the priorities, and the oldest items are evicted.
* The loops around the JAX libraries are the same code ([`benchmarks.jax_loops`][]); only the
  calls inside differ.
* Each time has a floor beside it: the time that the machine needs to move the data and to make the
  call ([`benchmarks.limits`][]).
* The results are files in `benchmarks/results`, of which `RESULTS.md` is made
  ([`benchmarks.page`][]). ``--against FILE`` names what differs from an earlier one
  ([`benchmarks.report`][]).

A row is one object ([`benchmarks.harness.Row`][]). A module in `benchmarks/rows` with a function
`rows(options)` adds rows. Peers that cannot be imported are left out, and the table says why.

Separate programs measure on a GPU, [`benchmarks.gpu`][], and over several devices,
[`benchmarks.devices`][]; [`benchmarks.compiled`][] and [`benchmarks.scale`][] count what programs
for accelerators, and for many devices, do without them.
"""
