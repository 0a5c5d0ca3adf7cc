"""Daily retraining: a folder of days, each with a model that is judged and promoted or not. See ``mosaic retrain``.

A server that uses the model reads it so::

    from mosaic.retrain import champion

    version = champion("folder")  # resolves the link once, so all files are of one version
    model.load_state_dict(safetensors.torch.load_file(version.weights))
"""

from mosaic.retrain.versions import Version, champion

__all__ = ["Version", "champion"]
