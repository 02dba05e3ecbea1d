"""Programs of others, with their own buffer and with jaxbuf: ``experiments.programs.NAME``.

Each script names the repository and the commit to clone and the packages to install, and fetches
nothing itself. It takes the path of the clone, and runs in an environment that has these packages
and jaxbuf. The runs go to ``docs/results/programs.csv``; ``experiments.programs.page`` draws them.
"""
