"""A folder of days: a model retrained on each day's data, judged, and promoted or kept. See ``mosaic retrain``.

A server that uses the model reads it so::

    from mosaic.retrain import champion

    version = champion("folder")  # resolved once: what is read from it belongs together
    model.load_state_dict(safetensors.torch.load_file(version.weights))
"""

from mosaic.retrain.versions import Version, champion

__all__ = ["Version", "champion"]
