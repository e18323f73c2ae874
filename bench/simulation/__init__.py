"""The scheduler and the KV bookkeeping under a workload, over a model of what a step costs instead of a model.

workload.py   who asks when, with how long a prompt, for how long an answer
world.py      the engine's loop with a clock of its own: plan, let time pass, commit
figures.py    what comes out of a run
variants.py   the policies compared, the rate that counts as a load of 1, what the scheduler itself costs
plot.py       the figures against load, as SVG
"""
