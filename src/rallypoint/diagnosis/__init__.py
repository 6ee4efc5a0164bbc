"""Why a job is stuck, slow or dead: facts in, an explanation out. Pure: no file, clock, socket."""
