"""Short causal convolution of each channel, one chunk, as layers have it before these ops (Mamba, arXiv:2312.00752)."""
from ...ir.builder import algorithm, carried, delay, latest, maximum, per_head, sigmoid


@algorithm(x="HV C K", w0="HV K", w1="HV K", w2=per_head(0.0, "HV K"), w3=per_head(0.0, "HV K"), bias=per_head(0.0, "HV K"),
           s1=carried("K"), s2=carried("K"), s3=carried("K"), s4=carried("K"))
def causal_conv1d(x, w0, w1, w2, w3, bias, s1, s2, s3, s4, *, linear=0.0):
    """Token t: z = bias + w0 x_t + w1 x_(t-1) + w2 x_(t-2) + w3 x_(t-3); y = z sigmoid(z), or z with linear=1."""
    x1 = delay(x, s1)  # the rows of the tokens before
    x2 = delay(x, s2, s1)
    x3 = delay(x, s3, s2, s1)
    z = bias[None, :] + w0[None, :] * x + w1[None, :] * x1 + w2[None, :] * x2 + w3[None, :] * x3
    y = z * maximum(sigmoid(z), linear)
    return y, latest(x), latest(x1), latest(x2), latest(x3)
