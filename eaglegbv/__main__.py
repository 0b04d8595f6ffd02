"""Entry point of the ``eaglegbv`` command and of ``python -m eaglegbv``."""

INTERRUPTED = 130  # exit status after Ctrl-C, as in a shell


def run() -> None:
    """Run the command; Ctrl-C ends it quietly at any moment, while it imports too."""
    try:
        from eaglegbv.cli.main import main

        main()
    except KeyboardInterrupt:
        raise SystemExit(INTERRUPTED) from None


if __name__ == "__main__":
    run()
