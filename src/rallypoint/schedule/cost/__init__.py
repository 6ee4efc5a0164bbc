"""The cost of programs: link models, and simulations on them; correctness is proof's subject."""
