"""Studies, which jobs never load: comparing libraries, predicting, drawing, writing scripts.

`rallypoint.cli` imports the commands in it by their names.
"""
