"""What the commands of a workbench run on top of the engine; nothing here is needed to serve a model.

bench    how fast a model runs here, and how near that is to the machine's limits
plan     what is measured
steps    works done by an engine's own steps, and timed
load     loading timed, in processes of its own
cost     the arithmetic and the bytes that a step asks for
limits   the machine's limits, measured
report   what comes out
"""
