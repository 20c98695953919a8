"""vLLM on block-outermost KV caches: the engine's own plugin mechanism, no fork, nothing changed unless asked for.

Install pm_ops next to vLLM, then ``PM_OPS=1`` or ``--additional-config '{"pm_ops": {}}'``.
:class:`pm_ops.adapters.vllm.config.Settings` says what can be asked for, ``pm-ops doctor vllm`` what is possible here.
"""
