"""``python -m eaglegbv``: the command line, where its script is not on the path."""

from eaglegbv.cli.main import main

if __name__ == "__main__":
    main()
