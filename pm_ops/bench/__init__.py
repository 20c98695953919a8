"""``pm-ops bench``: what the operators take on this machine, next to every other implementation found on it.

:mod:`.cases` holds the shapes, :mod:`.work` their data, :mod:`.oracle` what is right; :mod:`.ours`, :mod:`.baseline`
and ``peer_*`` bind implementations to it; :mod:`.suites` puts these together, :mod:`.runner` checks and times, and
:mod:`.report` and :mod:`.plots` tell.
"""
