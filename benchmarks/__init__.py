"""Side-by-side benchmarks of jaxbuf and its peers: ``python -m benchmarks --help``.

How it measures:

* The libraries of a row take turns in short blocks, A B C, B C A, C A B, ..., so that a noisy
  machine disturbs all of them alike. A time is the median over the blocks; a ratio is the median of
  the ratios *within* a turn, with its quartiles.
* They live in one process, but for peers that need an environment of their own
  ([`benchmarks.peer_process`][]): these wait in a process of theirs, and measure themselves when it
  is their turn.
* Before a row is timed, each library has to show that it does the work
  ([`benchmarks.equality`][]): the data read back are the data stored, the probabilities and
  weights are those of the priorities set, the oldest items are the ones evicted.
* The loops around the JAX libraries are the same code ([`benchmarks.jax_loops`][]); only the
  calls inside differ.
* Beside the times stands the floor under each: what the machine needs to move the data, and to make
  the call ([`benchmarks.limits`][]). What is aimed at is data, too ([`benchmarks.targets`][]).

A row is one object ([`benchmarks.harness.Row`][]); a module in `benchmarks/rows` with a function
`rows(options)` adds some. Peers that cannot be imported are left out, and the table says why.

Memory is told of compiled programs only. Peers in C++ take and keep memory as they like: the
resident set of their process does not grow with a call, whatever it needs.

What is measured on a GPU, in a program of its own, is in [`benchmarks.gpu`][].
"""
