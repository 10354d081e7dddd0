"""In place of pandas, which requirements-serve.txt does not install."""

raise ImportError("pandas is not installed")
