"""Tables, pictures and traces of profiles, plans and runs; and the progress line while they are made.

Neither ``rich`` nor ``matplotlib`` is imported before something is drawn with it.
"""
