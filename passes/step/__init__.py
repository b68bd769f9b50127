"""What a training step appends to a joint graph beside loss scaling: masters, the optimizer's update, low copies.

It imports ``passes.loss_scaling`` for the contract of joint graphs, and nothing of
``amp_graph``'s own files outside of ``passes``: an optimizer's rule is given to a pass as a function.
"""
