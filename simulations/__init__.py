"""Studies that a physicist or a builder of models would run: ``python -m simulations NAME``.

=========================  =========================================================================
``study``                  what a study is, and the list of them
``compare``                blocks trained side by side on texts and on images
``accuracy``               every approximation against exact results
``phase_diagram``          order and fluctuations against temperature, with Monte Carlo
``fidelity``               maps of every approximation's error over coupling, field and D
``trained_couplings``      where trained blocks live on these maps
``maps``                   what the two share: grids, errors without the noise, drawing
``large_d``                errors against the number of components, with fitted powers
``landscape``              the function that steepest descent minimizes, and Newton's path
``beta_sweep``             free energy, energy and entropy against beta, with Monte Carlo
``relaxation``             a quench, and the entropy that it produces
``hysteresis``             a field that is cycled, with the state carried along
``total_derivative``       the two terms of -dF/dh with couplings computed from h
``boltzmann``              couplings learned from spins and from fields
``class_token``            images read by a class token among spins
``aim``                    steps of two energies in turn: where they fall, rise and end
``energy_by_layer``        energies of real reviews over twelve tied layers, random and trained
``rank_collapse``          residuals by layer of networks and spin systems
``path_tasks``             which paths a network uses; a circle; sorting, hulls, memory
``data``                   real texts, word vectors and images, read from installed packages
``models``                 classifiers that differ only in their block; equal parameter counts
``training``               one run: schedule, batches, measurements
``runs``                   many runs: resumable, each in a process of its own
``approximations``         every approximation: how studies make it, name it and draw it
``options``                options that several studies take
``results``                what a study does with what it found, finished or not
``figures``                the look that all figures share, and how they are written
``plots``                  the figures of ``compare``
``class_token_plots``      the figures of ``class_token``
``aim_problem``            ``aim``: its problem, its states, its maps
``aim_plots``              the figures of ``aim``
``energy_by_layer_plots``  the figures of ``energy_by_layer``
``collapse_spins``         ``rank_collapse``: spin systems and energy steps, fields of any strength
``collapse_blocks``        ``rank_collapse``: classifiers, before and after training
``rank_collapse_plots``    the figures of ``rank_collapse``
``path_tasks_circle``      ``path_tasks``: the circle
``path_tasks_plots``       the figures of ``path_tasks``
``pretrained``             networks out of packages, checked by hash
``residuals``              residuals along depth, and how fast they fall
``tables``                 tables as text
``measure``                peak memory
=========================  =========================================================================
"""
