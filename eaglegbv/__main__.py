"""``python -m eaglegbv``: the command line, for use where its script is not on the path."""

from eaglegbv.cli.main import main

if __name__ == "__main__":
    main()
