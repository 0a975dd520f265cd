"""``python -m mlx_bucket``."""

from mlx_bucket.cli import main

if __name__ == "__main__":
    main()
