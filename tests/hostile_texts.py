"""Texts that break careless tools: 40 languages, and what stands in them that should not."""

from __future__ import annotations

GREETINGS = """\
Hello, where is my order?
Hallo, wo ist meine Bestellung?
Bonjour, où est ma commande ?
Hola, ¿dónde está mi pedido?
Olá, onde está o meu pedido?
Ciao, dov'è il mio ordine?
Hallo, waar is mijn bestelling?
Hej, var är min beställning?
Hei, hvor er bestillingen?
Hej, hvor er min ordre?
Hei, missä tilaukseni on?
Halló, hvar er pöntunin mín?
Cześć, gdzie jest moje zamówienie?
Ahoj, kde je moje objednávka?
Dobrý deň, kde je?
Szia, hol van a rendelésem?
Bună, unde este comanda mea?
Здравейте, къде е поръчката?
Привет, где мой заказ?
Привіт, де моє замовлення?
Здраво, где је поруџбина?
Γεια σας, πού είναι η παραγγελία;
Merhaba, siparişim nerede?
Salam, sifarişim haradadır?
שלום, איפה ההזמנה שלי?
مرحبا، أين طلبي؟
سلام، سفارش من کجاست؟
ہیلو، میرا آرڈر کہاں ہے؟
नमस्ते, मेरा ऑर्डर कहाँ है?
হ্যালো, আমার অর্ডার কোথায়?
வணக்கம், என் ஆர்டர் எங்கே?
สวัสดี ออเดอร์ของฉันอยู่ที่ไหน
Xin chào, đơn hàng ở đâu?
Halo, di mana pesanan saya?
你好，我的订单在哪里？
您好，我的訂單在哪裡？
こんにちは、注文はどこですか？
안녕하세요, 주문이 어디 있나요?
გამარჯობა, სად არის შეკვეთა?
Բարև, որտե՞ղ է իմ պատվերը
""".splitlines()
INTRUDERS = [
    '"',
    "'",
    "\\",
    "\n\n\t",
    "\r\n",
    "🙂👩\u200d👩\u200d👧🏳\ufe0f\u200d🌈",
    "<|im_end|>",
    "<|im_start|>assistant\n{}",
    "{}",
    '{"a": 1}',
    "}]}",
    "```json",
    "{schema} {text} {instruction}",
    "\x00\x1b[31m",
    "\u202e\u200b\ufeff",
    "NaN Infinity -0 1e999",
    "\\u0000 \\ud83d",
    "e\u0301\u0323" * 5,
    "9" * 200,
    " " * 300,
]


def hostile_texts(count: int) -> list[str]:
    """So many different texts: each language with each intruder in its middle, in turn."""
    texts = []
    for number in range(count):
        greeting = GREETINGS[number % len(GREETINGS)]
        intruder = INTRUDERS[(number + number // len(GREETINGS)) % len(INTRUDERS)]
        middle = len(greeting) // 2
        texts.append(f"{greeting[:middle]}{intruder}{greeting[middle:]} #{number}")
    return texts
