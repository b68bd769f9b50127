"""The end of a step of the planted scripts that have nothing to hide in it."""


def descend(optimizer, loss, scaler=None):
    """Take a step down the gradient of ``loss``, and print it."""
    optimizer.zero_grad()
    if scaler is None:
        loss.backward()
        optimizer.step()
    else:
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    print(loss.item())
