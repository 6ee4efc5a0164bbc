"""How agents that may die agree on who decides for their job, and on what was decided.

Pure: messages and `now` go in, messages and actions come out. `rules` keeps the job one job;
`participant` is what a driver holds. Where agreements are kept elsewhere than by the agents
themselves, that is another voter (`keyvalue.voter`).
"""
