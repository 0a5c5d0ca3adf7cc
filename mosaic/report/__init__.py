"""Tables, pictures and traces of profiles, plans and runs; and progress lines.

``rich`` and ``matplotlib`` are imported only for drawing.
"""
