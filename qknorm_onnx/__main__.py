"""`python -m qknorm_onnx` is the command `qknorm-onnx`."""

from qknorm_onnx.cli.main import main

if __name__ == "__main__":
    main()
