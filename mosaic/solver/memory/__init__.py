"""Plans whose devices hold what modules keep over the whole step."""
