"""Tickets in other languages than English: concerns, remarks and short ends of each."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Language:
    """Phrases of one language; ``concerns`` are those of each label."""

    greeting: str
    concerns: dict[str, tuple[str, ...]]
    remarks: tuple[str, ...]
    fillers: tuple[str, ...]
    between: str = " "


GERMAN = Language(
    "Guten Tag,",
    {
        "billing": (
            "auf meiner Rechnung stehen {amount}, vereinbart waren aber {amount2}.",
            "meine Karte wurde für Bestellung {order} zweimal belastet.",
        ),
        "technical": (
            "die App stürzt seit dem Update auf {version} ständig ab.",
            "beim Export kommt immer die Fehlermeldung {code}.",
        ),
        "login": (
            "ich habe mein Passwort vergessen und kann mich nicht anmelden.",
            "bitte ändern Sie die E-Mail-Adresse in meinem Profil.",
        ),
        "shipping": (
            "mein Paket {order} ist seit {count} Tagen nicht angekommen.",
            "der Bote hat die Sendung an eine falsche Adresse geliefert.",
        ),
        "refund": (
            "ich möchte mein Geld für Bestellung {order} zurück.",
            "ich habe die Ware am {date} zurückgeschickt und warte auf die Erstattung.",
        ),
        "opinion": (
            "ich wollte nur sagen, dass Ihr Service wirklich großartig ist.",
            "eine Idee: ein dunkles Design für die App wäre schön.",
        ),
    },
    (
        "Ich bin seit {year} Kunde bei Ihnen.",
        "Am Telefon habe ich {count} Minuten gewartet.",
        "In der Hilfe habe ich dazu nichts gefunden.",
        "Sie erreichen mich am besten am Vormittag.",
        "Entschuldigen Sie bitte die lange Nachricht.",
    ),
    (
        "Danke!",
        "Vielen Dank!",
        "Mit freundlichen Grüßen",
        "Ich freue mich auf Ihre Antwort.",
        "Danke im Voraus.",
    ),
)
FRENCH = Language(
    "Bonjour,",
    {
        "billing": (
            "ma facture indique {amount} au lieu de {amount2}.",
            "ma carte a été débitée deux fois pour la commande {order}.",
        ),
        "technical": (
            "l'application plante depuis la mise à jour {version}.",
            "le site affiche l'erreur {code} à chaque export.",
        ),
        "login": (
            "j'ai oublié mon mot de passe et je ne peux plus me connecter.",
            "merci de changer l'adresse e-mail de mon profil.",
        ),
        "shipping": (
            "mon colis {order} n'est toujours pas arrivé.",
            "le livreur a laissé le paquet à la mauvaise adresse.",
        ),
        "refund": (
            "je voudrais être remboursé pour la commande {order}.",
            "j'ai renvoyé l'article le {date} et j'attends mon remboursement.",
        ),
        "opinion": (
            "je voulais juste dire que votre équipe est formidable.",
            "une idée : un mode sombre serait très agréable.",
        ),
    },
    (
        "Je suis client depuis {year}.",
        "J'ai attendu {count} minutes au téléphone.",
        "Je n'ai rien trouvé dans la page d'aide.",
        "Vous pouvez me joindre le matin.",
        "Désolé pour ce long message.",
    ),
    ("Merci !", "Merci beaucoup.", "Bonne journée.", "J'attends votre réponse.", "Merci d'avance."),
)
SPANISH = Language(
    "Hola,",
    {
        "billing": (
            "en mi factura aparecen {amount} en lugar de {amount2}.",
            "me han cobrado dos veces el pedido {order}.",
        ),
        "technical": (
            "la aplicación se cierra sola desde la versión {version}.",
            "la página muestra el error {code} al exportar.",
        ),
        "login": (
            "olvidé mi contraseña y no puedo iniciar sesión.",
            "quiero cambiar el correo de mi perfil, por favor.",
        ),
        "shipping": (
            "mi paquete {order} todavía no ha llegado.",
            "el repartidor dejó el envío en otra dirección.",
        ),
        "refund": (
            "quiero que me devuelvan el dinero del pedido {order}.",
            "devolví el producto el {date} y espero el reembolso.",
        ),
        "opinion": (
            "solo quería decir que su equipo es fantástico.",
            "una sugerencia: sería bueno tener un modo oscuro.",
        ),
    },
    (
        "Soy cliente desde {year}.",
        "Esperé {count} minutos al teléfono.",
        "No encontré nada en la página de ayuda.",
        "Me pueden llamar por la mañana.",
        "Perdón por el mensaje tan largo.",
    ),
    ("Gracias.", "Muchas gracias.", "Un saludo.", "Espero su respuesta.", "Gracias de antemano."),
)
PORTUGUESE = Language(
    "Olá,",
    {
        "billing": (
            "a minha fatura mostra {amount} em vez de {amount2}.",
            "fui cobrado duas vezes pelo pedido {order}.",
        ),
        "technical": (
            "o aplicativo fecha sozinho desde a versão {version}.",
            "o site mostra o erro {code} ao exportar.",
        ),
        "login": (
            "esqueci a minha senha e não consigo entrar.",
            "quero mudar o e-mail do meu perfil, por favor.",
        ),
        "shipping": (
            "o meu pacote {order} ainda não chegou.",
            "o entregador deixou a encomenda no endereço errado.",
        ),
        "refund": (
            "quero o meu dinheiro de volta pelo pedido {order}.",
            "devolvi o produto em {date} e espero o reembolso.",
        ),
        "opinion": (
            "só queria dizer que a equipe de vocês é ótima.",
            "uma ideia: um modo escuro seria muito bom.",
        ),
    },
    (
        "Sou cliente desde {year}.",
        "Esperei {count} minutos no telefone.",
        "Não encontrei nada na página de ajuda.",
        "Podem me ligar de manhã.",
        "Desculpem a mensagem longa.",
    ),
    ("Obrigado.", "Muito obrigado.", "Um abraço.", "Espero a resposta.", "Obrigado desde já."),
)
CHINESE = Language(
    "您好，",
    {
        "billing": ("我的账单显示{amount}，应该是{amount2}。", "订单{order}被重复扣款了。"),
        "technical": ("升级到{version}以后应用总是闪退。", "导出报告时出现错误{code}。"),
        "login": ("我忘记了密码，无法登录。", "请帮我修改个人资料里的邮箱。"),
        "shipping": ("我的包裹{order}还没有到。", "快递送到了错误的地址。"),
        "refund": ("我想要订单{order}的退款。", "商品已经退回，请把钱退给我。"),
        "opinion": ("你们的服务非常好，谢谢。", "建议增加深色模式。"),
    },
    (
        "我从{year}年开始使用。",
        "电话等了{count}分钟。",
        "帮助页面里没有找到答案。",
        "上午可以联系我。",
        "请尽快回复。",
    ),
    ("谢谢！", "非常感谢。", "麻烦您了。", "等您回复。", "祝好。"),
    between="",
)
LANGUAGES = (GERMAN, FRENCH, SPANISH, PORTUGUESE, CHINESE)
