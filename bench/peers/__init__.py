"""miro beside llama.cpp: what `python bench/compare.py` runs.

works     what is compared, and what a system must be able to do
measure   the rounds, and the ratios that come out of them
engines   miro, by the engine's steps or by whole requests
wheel     llama.cpp from the xllamacpp wheel, in this process
native    llama.cpp's own programs
result    what is printed and saved
"""
