"""Studies that a physicist or a builder of models would run: ``python -m simulations NAME``.

======================  =========================================================================
``study``               what a study is, and the list of them
``compare``             blocks trained side by side on texts and on images
``accuracy``            every approximation against exact results
``phase_diagram``       order and fluctuations against temperature, with Monte Carlo
``fidelity``            maps of every approximation's error over coupling, field and D
``trained_couplings``   where trained blocks live on these maps
``maps``                what the two share: grids, errors without the noise, drawing
``large_d``             errors against the number of components, with fitted powers
``landscape``           the function that steepest descent minimizes, and Newton's path
``beta_sweep``          free energy, energy and entropy against beta, with Monte Carlo
``relaxation``          a quench, and the entropy that it produces
``hysteresis``          a field that is cycled, with the state carried along
``total_derivative``    the two terms of -dF/dh with couplings computed from h
``boltzmann``           couplings learned from spins and from fields
``class_token``         images read by a class token among spins
``data``                real texts, word vectors and images, read from installed packages
``models``              classifiers that differ only in their block; equal parameter counts
``training``            one run: schedule, batches, measurements
``runs``                many runs: resumable, each in a process of its own
``approximations``      every approximation: how studies make it, name it and draw it
``options``             options that several studies take
``results``             what a study does with what it found, finished or not
``figures``             the look that all figures share, and how they are written
``plots``               the figures of ``compare``
``class_token_plots``   the figures of ``class_token``
``tables``              tables as text
``measure``             peak memory
======================  =========================================================================
"""
