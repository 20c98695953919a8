"""Importing this makes two repairs to the interpreter of triton 3.6, where it runs: numpy >= 2.4, and bearable time.

numpy 2.4 no longer takes a one-element array for an int, which is what the interpreter's loop bounds are. And each call
of a jit function from another one patches triton.language anew, by inspecting all of it; once a launch is enough.
"""

from typing import Any

import torch

if not torch.cuda.is_available():
    from triton.runtime import interpreter
    from triton.runtime.interpreter import GridExecutor, InterpretedFunction

    patch_tensor = interpreter._patch_lang_tensor
    launch = GridExecutor.__call__
    patched: set[int] = set()

    def patch_tensor_with_index(tensor: type, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    def launch_unpatched(self: GridExecutor, *args: Any, **kwargs: Any) -> None:
        patched.clear()
        launch(self, *args, **kwargs)

    def call_patched(self: InterpretedFunction, *args: Any, **kwargs: Any) -> Any:
        if id(self.fn.__globals__) not in patched:
            interpreter._patch_lang(self.fn)
            patched.add(id(self.fn.__globals__))
        return self.rewrite()(*args, **kwargs)

    interpreter._patch_lang_tensor = patch_tensor_with_index
    GridExecutor.__call__ = launch_unpatched
    InterpretedFunction.__call__ = call_patched
