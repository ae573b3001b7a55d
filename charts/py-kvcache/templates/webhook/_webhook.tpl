{{- define "pykvcache.webhook" -}}pykvcache-webhook{{- end }}
{{- define "pykvcache.webhookPort" -}}9443{{- end }}
{{- define "pykvcache.webhookMetricsPort" -}}9412{{- end }}

{{/* The Secret that the webhook's pods mount: the operator's, cert-manager's or the user's own. */}}
{{- define "pykvcache.webhookSecret" -}}
{{- with .Values.webhook.certificates }}{{ ternary .secretName "pykvcache-webhook-tls" (eq .mode "Secret") }}{{- end }}
{{- end }}

{{/* Whether the operator makes the certificates: "true" or nothing. */}}
{{- define "pykvcache.operatorCertifies" -}}
{{- if and .Values.webhook.enabled (eq .Values.webhook.certificates.mode "Operator") }}true{{ end }}
{{- end }}

{{/* Namespaces whose pods are never sent to the webhook. Its own and the agent's are among them whatever the values say:
     with failurePolicy Fail neither could start otherwise. */}}
{{- define "pykvcache.excludedNamespaces" -}}
{{- concat .Values.webhook.excludedNamespaces (list .Release.Namespace .Values.agent.namespace) | uniq | toJson }}
{{- end }}

{{/* Fails where values of the webhook do not fit each other or the cluster. */}}
{{- define "pykvcache.checkWebhook" -}}
{{- with .Values.webhook.certificates }}
{{- if and (eq .mode "Secret") (not (and .secretName .caBundle)) }}
{{- fail "webhook.certificates.mode is Secret: set webhook.certificates.secretName to a Secret of type kubernetes.io/tls in the release's namespace, and webhook.certificates.caBundle to the PEM text of the CA that signed it (helm … --set-file webhook.certificates.caBundle=ca.crt)." }}
{{- end }}
{{- if and (ne .mode "Secret") (or .secretName .caBundle) }}
{{- fail (printf "webhook.certificates.secretName and caBundle belong to mode Secret, and the mode is %s. Set webhook.certificates.mode=Secret or leave both empty." .mode) }}
{{- end }}
{{- if and .issuerRef (ne .mode "CertManager") }}
{{- fail (printf "webhook.certificates.issuerRef belongs to mode CertManager, and the mode is %s. Set webhook.certificates.mode=CertManager or leave it empty." .mode) }}
{{- end }}
{{- if and (eq .mode "CertManager") (not ($.Capabilities.APIVersions.Has "cert-manager.io/v1")) }}
{{- fail "webhook.certificates.mode is CertManager, but this cluster does not serve cert-manager.io/v1. Install cert-manager first, or use mode Operator; without a cluster, render with --api-versions cert-manager.io/v1." }}
{{- end }}
{{- end }}
{{- end }}
