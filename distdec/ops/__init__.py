"""Local attention: each op is a contract with a PyTorch reference (`X.py`) and a Triton twin (`X_triton.py`)."""
