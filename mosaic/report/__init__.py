"""Tables, pictures and traces of profiles, plans and runs, and progress bars.

``rich`` and ``matplotlib`` are imported only for drawing.
"""
