"""Studies that a physicist or a builder of models would run: ``python -m simulations NAME``.

======================  =========================================================================
``study``               what a study is, and the list of them
``compare``             blocks trained side by side on texts and on images
``data``                real texts, word vectors and images, read from installed packages
``models``              classifiers that differ only in their block; equal parameter counts
``training``            one run: schedule, batches, measurements
``runs``                many runs: resumable, each in a process of its own
``plots``               figures
======================  =========================================================================
"""
