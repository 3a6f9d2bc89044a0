"""Calibration of a model on text: `calibrate` measures, `trial` tries the methods, `unfinished` keeps what is done."""
