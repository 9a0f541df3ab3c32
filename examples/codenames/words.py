"""The word list: twelve kinds of things, eight words of each, none of which is of two kinds."""

from __future__ import annotations

KINDS: dict[str, tuple[str, ...]] = {
    "fruit": ("apple", "pear", "plum", "cherry", "lemon", "mango", "grape", "peach"),
    "mammal": ("dog", "horse", "cow", "sheep", "goat", "rabbit", "lion", "bear"),
    "bird": ("eagle", "crow", "swan", "owl", "robin", "parrot", "goose", "pigeon"),
    "fish": ("trout", "salmon", "shark", "tuna", "cod", "eel", "carp", "herring"),
    "tool": ("hammer", "saw", "drill", "axe", "spade", "wrench", "chisel", "pliers"),
    "metal": ("iron", "gold", "silver", "copper", "tin", "lead", "zinc", "nickel"),
    "colour": ("red", "blue", "green", "yellow", "purple", "white", "black", "brown"),
    "instrument": ("piano", "violin", "flute", "drum", "harp", "trumpet", "guitar", "cello"),
    "sport": ("tennis", "football", "hockey", "rugby", "golf", "boxing", "judo", "rowing"),
    "clothes": ("shirt", "coat", "sock", "glove", "hat", "scarf", "skirt", "boot"),
    "furniture": ("table", "chair", "sofa", "bed", "desk", "shelf", "stool", "wardrobe"),
    "vehicle": ("car", "bus", "train", "boat", "truck", "tram", "plane", "bicycle"),
}
KIND_OF: dict[str, str] = {word: kind for kind, words in KINDS.items() for word in words}
