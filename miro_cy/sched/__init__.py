"""Continuous batching: which sequence computes how many tokens in the next step. Ints only; no tensor, no model.

request    the states of a sequence: typed handles over one table, every transition through one gate
sequence   what the table keeps of each
sets       which handle waits, was preempted, computes its prompt or decodes
forks      a sequence that goes on from where another one is; families  how many a request may have
relatives  what changes families between two steps
room       which blocks are left for whom
policy     who is admitted next
limits     what is refused when a request arrives
rate       when a refused client should return
budget     how many prompt tokens fit a step's time; cost  the model that says so
scheduler  plan() a step, commit() what it did, fork() what goes on in two ways; visible  what can be seen of it
"""
