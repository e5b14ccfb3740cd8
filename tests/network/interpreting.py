"""Triton's interpreter, which is spared what it would do again and again."""

from typing import Any

from triton.runtime import interpreter


def spare_repetition() -> None:
    """Let a kernel look through Triton's language once for each module whose functions it calls,
    not at each call; and look up types of NumPy in one table, not in a new one each time."""
    prepared: set[int] = set()
    launch = interpreter.GridExecutor.__call__

    def launched(self: Any, *arguments: Any, **settings: Any) -> Any:
        prepared.clear()
        return launch(self, *arguments, **settings)

    def called(self: Any, *arguments: Any, **settings: Any) -> Any:
        module = id(self.fn.__globals__)
        if module not in prepared:
            interpreter._patch_lang(self.fn)
            prepared.add(module)
        return self.rewrite()(*arguments, **settings)

    look_up, known = interpreter._get_np_dtype, dict[str, Any]()

    def type_of_numpy(kind: Any) -> Any:
        name = kind.scalar.name
        if name not in known:
            known[name] = look_up(kind)
        return known[name]

    interpreter.GridExecutor.__call__ = launched
    interpreter.InterpretedFunction.__call__ = called
    interpreter._get_np_dtype = type_of_numpy
