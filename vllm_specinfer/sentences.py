"""What is wrong, in one line."""


def sentence(error: Exception) -> str:
    """What an error says, without what libraries say around it."""
    if hasattr(error, "errors"):  # pydantic's: vLLM's arguments and configs
        return "; ".join(
            ": ".join(filter(None, (".".join(map(str, of["loc"])), of["msg"])))
            for of in error.errors()
        )
    if isinstance(error, OSError) and error.strerror is not None and error.filename:
        return f"{error.filename}: {error.strerror}"
    # transformers explains at length what its first line says, if it says anything.
    first, _, others = str(error).partition("\n")
    return " ".join(str(error).split()) if first.rstrip().endswith(":") else first
