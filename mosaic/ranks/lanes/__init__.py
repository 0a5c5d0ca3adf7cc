"""Where routed calls run on a rank: on threads of the host (``host_calls``) or on a GPU's streams (``stream_calls``).

``run`` is both behind one face, that of the engine's executors. Imports ``calls`` and what that imports.
"""
