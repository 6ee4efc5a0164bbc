"""Calls of a job as events of Chrome's trace format; pure.

a job's calls --clocks--> on one clock --tracks--> tracks without overlaps --chrome--> events
"""
