"""What pytest leaves out here: the examples of a package that cannot be imported without MPI."""

import importlib.util

collect_ignore_glob = [] if importlib.util.find_spec("mpi4jax") else ["jaxbuf/mpi/*"]
