"""How processes that mpirun, srun or similar started meet, without a launcher of ours.

meeting.py ----> rank 0's store and the way to it: Meeting
pmi.py, pmix.py: the launcher passes on a text of rank 0
"""
