"""What a program costs: links as models, programs simulated on them; none is judged right here."""
