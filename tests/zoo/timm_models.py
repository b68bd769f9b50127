"""timm's image models, one or two of a family, at their smallest sizes and 64 px."""

from functools import partial

from tests.zoo.model import Table, built, noise

TABLE = Table()

# In these the size of images is given when the model is built.
SIZED = (
    *("vit_tiny_patch16_224", "deit_tiny_distilled_patch16_224", "mixer_s16_224", "resmlp_12_224"),
    *("cait_xxs24_224", "beit_base_patch16_224", "eva02_tiny_patch14_224", "swin_tiny_patch4_window7_224"),
    *("swinv2_cr_tiny_224", "pit_ti_224", "convit_tiny", "xcit_nano_12_p16_224", "visformer_tiny"),
    *("coat_tiny", "volo_d1_224", "twins_pcpvt_small", "maxvit_rmlp_nano_rw_256", "hiera_tiny_224", "levit_128s"),
)
SIZES = {"eva02_tiny_patch14_224": 56, "volo_d1_224": 64, "levit_128s": 64}
# Depths that make the larger ones small.
SHALLOW = {
    "vit_tiny_patch16_224": {"depth": 2}, "deit_tiny_distilled_patch16_224": {"depth": 2},
    "cait_xxs24_224": {"depth": 2},
    "beit_base_patch16_224": {"depth": 2, "embed_dim": 96, "num_heads": 4}, "eva02_tiny_patch14_224": {"depth": 2},
    "swin_tiny_patch4_window7_224": {"depths": (1, 1), "num_heads": (2, 4), "embed_dim": 32, "window_size": 4},
    "xcit_nano_12_p16_224": {"depth": 2}, "convit_tiny": {"depth": 3},
}  # fmt: skip
CONVOLUTIONAL = (
    *(
        "resnet18",
        "resnext26ts",
        "seresnet18",
        "ese_vovnet19b_dw",
        "densenet121",
        "dla34",
        "dpn48b",
        "mobilenetv3_small_050",
    ),
    *("efficientnet_lite0", "tf_efficientnet_b0", "ghostnet_050", "mnasnet_small", "regnetx_002", "regnety_002"),
    *("repvgg_a0", "convnext_atto", "convnextv2_atto", "edgenext_xx_small", "fastvit_t8", "mobileone_s0", "lcnet_035"),
    *("hrnet_w18_small", "res2net50_14w_8s", "selecsls42", "skresnet18", "poolformer_s12", "pvt_v2_b0", "nfnet_l0"),
    *("inception_v3", "xception41", "darknet17", "cspresnet50", "halonet26t", "lambda_resnet26t", "botnet26t_256"),
    *("efficientvit_b0", "mobilevit_xxs", "mobilevitv2_050", "repvit_m0_9", "starnet_s1", "tresnet_m", "vgg11"),
    *("gcresnext26ts", "eca_nfnet_l0", "bat_resnext26ts", "sehalonet33ts", "inception_next_atto", "rdnet_tiny"),
)
PIXELS = {"inception_v3": 96, "halonet26t": 128, "sehalonet33ts": 128}


CREATE = "timm:create_model"
for _name in SIZED:
    _pixels = SIZES.get(_name, 64)
    _build = partial(built, CREATE, _name, num_classes=10, img_size=_pixels, **SHALLOW.get(_name, {}))
    TABLE.add("timm", f"timm/{_name}", _build, noise(3, _pixels, _pixels))
for _name in CONVOLUTIONAL:
    _pixels = PIXELS.get(_name, 64)
    TABLE.add("timm", f"timm/{_name}", partial(built, CREATE, _name, num_classes=10), noise(3, _pixels, _pixels))
