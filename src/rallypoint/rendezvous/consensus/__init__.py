"""How agents that may die agree on which of them decides for their job, and on its decisions.

Pure: messages and `now` go in, messages and actions come out. `rules` guarantees that there is one
job; `participant` is the class for drivers. If the agreements are kept elsewhere than by the agents
themselves, that is another voter (`keyvalue.voter`).
"""
