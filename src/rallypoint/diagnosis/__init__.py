"""Why a job is stuck, slow or dead: facts in, a verdict out. Pure: no file, clock or socket."""
