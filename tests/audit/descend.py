"""The end of a step of the planted scripts that have nothing to hide in it."""


def descend(optimizer, loss):
    """Take a step down the gradient of ``loss``, and print it."""
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(loss.item())
