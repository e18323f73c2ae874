"""Continuous batching: which sequence computes how many tokens in the next step. Ints only; no tensor, no model.

request    the states of a sequence: typed handles over one table, every transition through one gate
sets       which handle waits, computes its prompt or decodes, in order of arrival
limits     what is refused when a request arrives
budget     how many prompt tokens fit a step's time
scheduler  the policy: plan() a step, commit() what it did
"""
