"""The cost of programs: link models, and simulations with them; proof/ covers correctness."""
