"""LSTM, GRU and RNN layers: by cuDNN, by oneDNN, or by compiled C.

One function chooses among the three, so CPU and CUDA share this room.
Imports the core and ``backends/cpu/linear``.
"""
