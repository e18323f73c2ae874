"""What the commands of a workbench run on top of the engine; nothing here is needed to serve a model.

bench    how fast a model runs here, and how near that is to the machine's limits
cost     the arithmetic and the bytes that a step asks for
limits   the machine's limits, measured
"""
