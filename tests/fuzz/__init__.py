"""Fuzz every reader of bytes that the package did not write.

A target is a function of bytes. It returns if the reader under test read the bytes, or refused them with an error of
the package; it raises on a defect (:mod:`.contract`). ``pytest tests/fuzz`` runs each target for a moment, always with
the same inputs. A long run is guided by coverage if atheris (extra ``fuzz``) is installed::

    python -m tests.fuzz dockerfile -max_total_time=600
"""
