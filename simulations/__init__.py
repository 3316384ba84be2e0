"""Studies that a physicist or a builder of models would run: ``python -m simulations NAME``.

======================  =========================================================================
``study``               what a study is, and the list of them
``compare``             blocks trained side by side on texts and on images
``accuracy``            every approximation against exact results
``total_derivative``    the two terms of -dF/dh with couplings computed from h
``boltzmann``           couplings learned from spins and from fields
``class_token``         images read by a class token among spins
``data``                real texts, word vectors and images, read from installed packages
``models``              classifiers that differ only in their block; equal parameter counts
``training``            one run: schedule, batches, measurements
``runs``                many runs: resumable, each in a process of its own
``options``             options that several studies take
``figures``             the look that all figures share, and how they are written
``plots``               the figures of ``compare``
``class_token_plots``   the figures of ``class_token``
``tables``              tables as text
``measure``             peak memory
======================  =========================================================================
"""
