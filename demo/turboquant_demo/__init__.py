"""The files of ``turboquant demo``: a model, a passage and a calibration. README.md beside this file describes them."""
