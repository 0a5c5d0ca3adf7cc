"""One call of a module that runs on some of the ranks: what is agreed, moved and computed, in which order, and back.

``ranked`` is the module, ``exchange`` its messages. ``passing`` takes one call of it through its steps, on threads of
the host (``host_calls``) or on a GPU's streams (``stream_calls``). ``run`` is both behind one face.
"""
